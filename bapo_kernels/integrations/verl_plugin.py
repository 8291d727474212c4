"""What `import verl` loads from us (entry points `verl.plugins`): the losses go into its registry."""

import warnings

from bapo_kernels.integrations.verl import register

try:
    register()
except Exception as error:  # verl would say so at the level DEBUG only
    warnings.warn(f"bapo_kernels: the losses are not registered with verl: {error}", stacklevel=1)
    raise
