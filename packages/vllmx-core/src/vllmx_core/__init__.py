"""Types, protocols, plugin registry, numpy reference operations and conformance kit of vllmx.

Import from the modules: `vllmx_core.plan`, `vllmx_core.model`, `vllmx_core.backend`, ...
"""

__version__ = "0.1.0"
