"""What tests, the demo and the benchmark share: tolerances and inputs."""
