import sys

from exporter.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
