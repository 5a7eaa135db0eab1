"""`python -m convert`."""

from convert.cli import main

main()
