"""The real thing: coordinator, servers and devices as processes that talk over gRPC and survive
`kill -9`.
"""
