"""What travels between roles, and who may connect: letters, frames, gRPC, mutual TLS."""

import os

# What gRPC and OpenSSL would write to stderr, between lines of JSON, is said in sentences.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# gRPC for Python cannot be told a least version of TLS. This suite of TLS 1.2 wants RSA keys, and
# those of a deployment are elliptic curves: TLS 1.3, whose suites are others, is all that is left.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
