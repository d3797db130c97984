"""veRL 0.9.1 without a GPU: a platform, engines for device "cpu", and three patches.

platform   what veRL asks a device, answered for the CPU            engines   FSDP2 on the CPU
patches    the functions of veRL that know no CPU, guarded by version and by their text

Nothing here imports torch or veRL until `install` is called, in each of veRL's processes. The modules are imported by
`install` alone: veRL's import loads us, and would find the one half made that imported veRL.
"""

from __future__ import annotations

import os


def environment_variables() -> dict[str, str]:
    """What must be set in each process before verl is imported."""
    return {
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQ_NUM_THREADS": str(min(8, os.cpu_count() or 1)),  # TransferQueue's own 8 is told of on fewer cores
    }


def install() -> None:
    """Make this process's veRL run on the CPU.

    Raises:
        TrainerError: the installed veRL is not the one that the patches are made for.
    """
    from agenttrain_verl.cpu import patches, platform

    platform.register()
    patches.apply()
