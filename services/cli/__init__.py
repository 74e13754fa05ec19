"""The `baton` command: it supervises the processes of one machine, and talks to them as any client would.

Imports `shared` alone. The heart is `supervisor.Supervisor`, which knows neither real processes nor HTTP.
"""
