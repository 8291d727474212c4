import sys

from bapo_kernels.cli import main

sys.exit(main())
