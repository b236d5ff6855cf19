"""`python -m xtoken`: the command `xtoken`."""

from xtoken_services.cli import main

main()
