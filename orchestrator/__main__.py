"""``python -m orchestrator`` is the command ``orchestrator``."""

import sys

from orchestrator.cli import main

sys.exit(main())
