"""One queue for many hosts: PostgreSQL keeps the order, one elected server decides it, each host keeps its promises.

`messages` are what hosts, servers and the dispatcher say to each other. `dispatcher` and `host_side` are pure state
machines, like the core: messages in, effects out, and the time is an argument.
"""
