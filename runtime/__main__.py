import sys

from runtime.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
