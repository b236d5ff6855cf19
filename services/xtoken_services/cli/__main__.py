"""`python -m xtoken_services.cli`: the same as `xtoken`."""

from xtoken_services.cli.app import main

main()
