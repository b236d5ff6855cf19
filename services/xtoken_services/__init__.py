"""The processes of xtoken: one folder each, and the command line that starts them."""
