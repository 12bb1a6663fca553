"""APIs, one a folder. None imports another; see vllmx_server.generating.api."""
