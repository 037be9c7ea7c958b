"""What travels between coordinator and replicas: frames, their handshake and encryption, vectors and their codecs."""
