"""The models on this worker: restored, saved as recovery points, handed over.

A model has two records here, one for each side of the worker. ``hosted.HostedModel`` is the event
loop's: whether the model's state is on the device, which jobs wait for that, what has changed since
its newest recovery point. ``execution.executor.DeviceModel`` is the device thread's: the adapter's
configuration, its log position and its optimizer steps.
"""
