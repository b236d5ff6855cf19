"""The control plane's HTTP interface: models of what goes in and out, and the routes by what they are about.

Every route that only reads is answered from the database, the supervisors' last words and the runs' files
(`services.control.views`): no reader's request reaches a worker or the queue.
"""
