"""Programs that verifiers start in judging sandboxes: the standard library only, and pytest where tests are run.

They are laid into the sandbox as files, at the same import path, and import nothing else of agenttrain.
"""
