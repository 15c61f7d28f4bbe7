"""What `make setup` installs: every version pinned and every file's SHA-256 listed, in the .txt files beside this one."""
