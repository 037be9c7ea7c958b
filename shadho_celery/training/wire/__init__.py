"""Protocol between coordinator and replicas: frames, handshake, encryption, and the vectors in the payloads."""
