"""``python -m harness``."""

import sys

try:
    from harness.cli.app import main
except KeyboardInterrupt:
    print("harness: interrupted; verdict UNKNOWN", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    main()
