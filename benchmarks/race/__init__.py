"""The benchmark against other runtimes: its contenders, its workloads, and how it runs them."""
