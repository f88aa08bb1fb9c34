"""HTTP layers: connections, bodies, access rules, request ids, errors."""
