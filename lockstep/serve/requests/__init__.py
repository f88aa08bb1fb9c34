"""The path of a request through the server, independent of the API that it came by."""
