"""The engines that `peers_cpu.py` compares, each measured in a process of its own."""
