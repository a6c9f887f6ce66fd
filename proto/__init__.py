"""The sources of the protocol, and the program that generates code from them."""
