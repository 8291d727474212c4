"""Importing it replaces verl's fused heads: VERL_USE_EXTERNAL_MODULES=bapo_kernels.integrations.verl_head does so in every worker."""

from bapo_kernels.integrations.verl import use_fused_head

use_fused_head()
