"""The packages that `make setup` installs. The .txt files here pin each version and list the SHA-256 of each file."""
