"""``python -m murano``: the command line."""

from murano.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
