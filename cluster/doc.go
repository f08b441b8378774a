// Package cluster is membership by gossip (hashicorp/memberlist), and the ring that follows from it.
//
// A Cluster publishes immutable Views. One goroutine owns the state and makes the views; the gossip library's callbacks
// only append to its queue, and never call the library.
//
// What it does not promise: views of different nodes agree only once changes have spread (a few hundred milliseconds)
// and faults are over; a member that is slow or cut off may be declared dead, here or elsewhere, while it lives; and
// both sides of a split go on with rings of their own. A View therefore says who should own a partition, never who may
// decide for it: that is package ownership.
//
// # Verification
//
// Gossip proves nothing. A host that can write it (without a key, any host that reaches the port) can name any process
// at any address, in any state. So a process counts only once it has answered on its peer port, over mutual TLS where
// that is configured, under the name, boot and ports that gossip says; until then the gossip library does not see it,
// and neither probes it nor spreads it. A process that answers at an address ends the verification of those that were
// there before. Other content of gossip is believed: states, and that a member that was leaving is gone. Any other
// member that gossip declares dead is asked on its peer port first, for a second, since a machine that is too busy for
// gossip may answer there. One that answers counts for ten seconds, within which gossip must hear it again; the library
// is made to tell it that it was declared dead. One that does not answer is forgotten, and when it is heard again it is
// asked like any other process.
//
// Verification, members, connections and log lines about strangers are bounded. A connection from the address of a seed
// or a member has a place beside those of strangers.
//
// # Names and boots
//
// A member's ring name is stable (the pod's name); its gossip name is that and the boot, a random number that each
// process start draws anew, so that a process that comes back is another member to the gossip, and the same one to
// the ring. Of two processes with one name, one counts:
//
//   - At one address only one can live: the one that has answered there last.
//   - At different addresses, an active or leaving one counts before one that is joining, then the higher boot. The
//     process that does not count never becomes active, and when the other still answers after Config.ConflictTimeout
//     it reports a fatal error. On gossip's word alone no process ends.
//
// # Start
//
// A node without seeds is active at once. One with seeds is joining until it has heard of another member, has tried its
// seeds once, and no member has come or gone for Config.Settle. When no seed answers for Config.SeedTimeout it goes on
// alone, says so in Ready, and keeps trying. While no seed's name resolves it keeps waiting: it has no address to ask,
// and a node that went on alone whenever the DNS is away, or still caches that a Service has no pods (for 30 s in many
// Kubernetes clusters), would admit everything a second time. The library never heals a split, so a node with seeds
// tries, for ever, those that are not among its live members.
//
// # Rejection
//
// Nodes with other ring settings, another list of voters, another hash key, another protocol or another gossip key
// reject each other as members; both log it. The newcomer does not go on alone, because it would admit everything a
// second time: a node that is still joining and finds itself rejected, or hears of others that do not answer on their
// peer ports, stays joining and says so. When an established node itself says, on its peer port, that its settings
// differ, the newcomer reports a fatal error.
package cluster
