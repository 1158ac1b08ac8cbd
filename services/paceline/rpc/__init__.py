"""gRPC, the same in every service: servers, channels, the status table, bulk messages."""
