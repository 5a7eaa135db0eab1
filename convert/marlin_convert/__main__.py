"""`python -m marlin_convert`."""

from marlin_convert.cli import main

main()
