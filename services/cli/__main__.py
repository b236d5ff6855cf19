"""`python -m services.cli`: the same as `xtoken`."""

from services.cli.app import main

main()
