"""`python -m captum_vz` is `captum-vz`."""

import sys

from captum_vz.cli import main

sys.exit(main())
