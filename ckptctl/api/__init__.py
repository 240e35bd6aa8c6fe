"""The public Python functions: the same operations as the commands, with typed results."""

from __future__ import annotations

from ckptctl.api.comparison import diff as diff
from ckptctl.api.conversion import conversion_options as conversion_options
from ckptctl.api.conversion import convert as convert
from ckptctl.api.conversion import plan_conversion as plan_conversion
from ckptctl.api.extraction import extract as extract
from ckptctl.api.inspection import inspect as inspect
from ckptctl.api.merging import merge as merge
from ckptctl.api.merging import plan_merge as plan_merge
from ckptctl.api.options import Options as Options
from ckptctl.api.reporting import report as report
from ckptctl.api.verification import verify as verify
