"""``python -m faults``: run the fault tests from a checkout."""

import sys

try:
    from faults.cli import app
    from harness.cli.app import main
except KeyboardInterrupt:
    print("faults: interrupted; verdict UNKNOWN", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    main(app)
