"""A deployment on one machine: its processes are started and watched, its logs become one."""
