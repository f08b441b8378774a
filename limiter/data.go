package limiter

import "github.com/weirlimit/weir/cluster/ownership"

// Data is what this node holds of the partitions, for the ownership core to move about.
func (l *Limiter) Data() ownership.Data { return l.store }

// Version is at least every ticket that the partition's answers wait for.
func (l *Limiter) Version(partition int) uint64 { return l.store.Version(partition) }
