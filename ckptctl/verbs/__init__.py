"""Commands that read: inspect, verify, diff, extract, map, report and doctor."""
