"""``python -m harness``."""

import sys
import traceback

try:
    from harness.cli.app import main
except KeyboardInterrupt:
    print("harness: interrupted; verdict UNKNOWN", file=sys.stderr)
    sys.exit(2)
except Exception:
    # A broken installation, too, must not exit with the code of a REGRESSION.
    traceback.print_exc()
    sys.exit(2)

if __name__ == "__main__":
    main()
