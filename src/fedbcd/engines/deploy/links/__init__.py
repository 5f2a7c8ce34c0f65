"""What travels between roles, and who may connect: letters, frames, gRPC, mutual TLS."""
