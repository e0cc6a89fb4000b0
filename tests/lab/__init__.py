"""Long measurements and campaigns that no suite waits for: benchmarks, torture, the soak."""
