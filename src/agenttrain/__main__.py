"""`python -m agenttrain` is `agenttrain`."""

from agenttrain.cli import main

if __name__ == "__main__":
    main()
