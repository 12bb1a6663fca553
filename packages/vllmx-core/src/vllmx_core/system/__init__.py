"""Operating system services: files, logs, memory, processors, deadlines."""
