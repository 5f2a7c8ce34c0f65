"""What travels between roles, and who may connect: letters, frames, gRPC, mutual TLS."""

import os

# What gRPC and OpenSSL would write to stderr, between lines of JSON, is said in sentences.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
