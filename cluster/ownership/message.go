package ownership

import "time"

// Node is a process: a ring name, and a boot id that differs at each start. The zero Node is no process.
type Node struct {
	Name string
	Boot uint64
}

// Message is what two nodes' Cores send each other. Messages may be lost, repeated and reordered; a Core repeats those
// that must arrive. The slices of a Message do not change after it has been sent.
type Message interface{ message() }

// Envelope is a Message on its way.
type Envelope struct {
	From, To Node
	Message  Message
}

// Query asks a member what it knows of partitions that the sender is about to claim.
type Query struct {
	ID         uint64
	Partitions []int
}

// QueryReply answers a Query, in its order. With ID 0 it answers none, and lists what the sender holds.
type QueryReply struct {
	ID    uint64
	Infos []Info
}

// Info is what a node knows of a partition.
type Info struct {
	Partition int
	Held      bool     // by the sender, under Term
	Claiming  bool     // the sender is about to claim it as well, or awaits disks that may have it
	Term      Term     // the highest known to have been held
	Holder    Node     // its holder; may be the zero Node
	Copy      Position // of a complete copy; with Held of that on the sender's disk; zero when there is none
}

// Position says how new a copy is: the term under which its holder last changed it, and the attachment that it was sent
// in.
type Position struct {
	Term       Term
	Attachment uint64
}

// Entrust asks the node with the best copy of a lost partition to claim it.
type Entrust struct {
	Partition int
	Term      Term // the highest known to have been held
}

// Offer asks a node whether it takes a partition over.
type Offer struct {
	Partition int
	Term      Term // the sender's
}

// Verdict answers an Offer.
type Verdict uint8

// The verdicts.
const (
	Accepted Verdict = 1 // send it
	Merging  Verdict = 2 // send it: the receiver holds the partition too, and merges
	Refused  Verdict = 3 // not now: the receiver is busy, leaving, or sees another ring
)

// OfferReply answers an Offer.
type OfferReply struct {
	Partition int
	Term      Term // of the Offer
	Verdict   Verdict
}

// Block is a part of the log from one process to another. The log carries the changes of all copies that the sender
// keeps at the receiver.
type Block struct {
	Log      uint64 // rises with each log from this sender to any process; a later log replaces the one before
	Position uint64 // 1 for the first block of a log, then one above the block before
	Heard    uint64 // the sender knows the refusals up to this position
	Entries  []Entry
	Sum      uint32 // CRC-32C of the chunks
}

// Entry changes one copy.
type Entry struct {
	Partition int
	Term      Term
	// Numbers the holder's attachments of followers: no two of a partition and a holder share a number.
	Attachment uint64
	Begin      bool // of an attachment's first chunk: a whole copy begins, which is staged until Complete
	Complete   bool // with this entry the whole copy is complete
	More       bool // the chunk goes on in the next entry of the log
	Join       bool // of a copy that was restored: to be joined with the receiver's content
	Origin     Term // with Begin: the term that the history of the content began with
	Chunk      []byte
}

// BlockAck answers a Block: all entries up to a position are taken in, except those that are refused.
type BlockAck struct {
	Log      uint64
	Position uint64
	Lost     bool      // the receiver has forgotten the log: begin all copies anew, in another log
	Refusals []Refusal // all that the sender has not said it knows
}

// Refusal ends an attachment.
type Refusal struct {
	Position   uint64 // of its block
	Partition  int
	Attachment uint64
	Outcome    Outcome // not Done
	Known      Term    // with Superseded and Conflict: the higher term
	Holder     Node    // and its holder
}

// Outcome answers an Entry or a Commit.
type Outcome uint8

// The outcomes.
const (
	Done       Outcome = 1
	Again      Outcome = 2 // the copy has a gap or is damaged: begin anew
	Superseded Outcome = 3 // a higher term is known
	Conflict   Outcome = 4 // the receiver holds the partition itself
	Full       Outcome = 5 // the receiver has no room for the copy, and keeps none: begin anew later
)

// Commit hands a partition over: the sender has stopped deciding and gives up its present term, which sender and term
// prove to voters. The receiver holds the partition under a higher term from the moment it has this message. The sender
// repeats it until it is answered.
type Commit struct {
	Partition  int
	Term       Term
	Attachment uint64 // of the receiver's copy
	Chunk      []byte // the last changes
	Sum        uint32 // CRC-32C of Chunk
	Known      Term   // the highest term the sender knows of
	Merge      bool   // the receiver has said that it holds the partition too
	Granted    bool   // the sender had a grant for its strict rules, so its content is whole for them
}

// CommitAck answers a Commit.
type CommitAck struct {
	Partition  int
	Term       Term // of the Commit
	Outcome    Outcome
	New        Term   // with Done: the receiver's
	Keep       bool   // with Done: the sender is the receiver's backup and keeps its copy
	Attachment uint64 // with Keep: of that copy
	Known      Term   // with Superseded and Conflict: the higher term
}

// Forget tells a follower that its copy is not needed any more.
type Forget struct {
	Partition int
	Term      Term // of the holder
}

// GrantRequest asks a voter to record, or go on recording, the sender as the holder of partitions.
type GrantRequest struct {
	ID    uint64
	Items []GrantItem
}

// GrantItem is one partition of a GrantRequest.
type GrantItem struct {
	Partition int
	Term      Term
	Backup    Node    // the backup that the sender's answers wait for; the zero Node: they do not wait
	Release   Release // of the record to be replaced; zero when it was not released
}

// Release proves that a process has given up a term.
type Release struct {
	Node Node
	Term Term
}

// GrantReply answers a GrantRequest, in its order.
type GrantReply struct {
	ID    uint64
	Epoch uint64 // the lowest that the voter records
	Items []GrantAnswer
}

// GrantAnswer is a voter's answer for one partition.
type GrantAnswer struct {
	Partition int
	Term      Term
	Granted   bool
	// Recorded is, of a refusal, the record that stands against it, and Wait how long that lasts at most. Of a grant,
	// Recorded is the record of another process that the sender's has replaced, repeated with every grant; the zero
	// Record if there was none.
	Recorded Record
	Wait     time.Duration
}

// Record is what a voter has recorded for a partition.
type Record struct {
	Partition int
	Term      Term
	Node      Node
	Backup    Node
	ID        uint64 // of the request that wrote it: an older one of the same process and term does not overwrite it
}

// ReadRecords asks a voter for all its records. A restarted voter sends it.
type ReadRecords struct{ ID uint64 }

// Records answers ReadRecords.
type Records struct {
	ID      uint64
	Read    bool // the sender has done its own reading; otherwise it has no records
	Epoch   uint64
	Fresh   bool     // the sender began its epoch, and no voter but the receiver can have adopted it
	Records []Record // of each partition the record, and the record of another process that it has replaced
}

func (*Query) message()        {}
func (*QueryReply) message()   {}
func (*Entrust) message()      {}
func (*Offer) message()        {}
func (*OfferReply) message()   {}
func (*Block) message()        {}
func (*BlockAck) message()     {}
func (*Commit) message()       {}
func (*CommitAck) message()    {}
func (*Forget) message()       {}
func (*GrantRequest) message() {}
func (*GrantReply) message()   {}
func (*ReadRecords) message()  {}
func (*Records) message()      {}
