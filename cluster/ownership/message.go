package ownership

import "time"

// Node is a process: a ring name and the boot that tells its process starts apart. The zero Node is nobody.
type Node struct {
	Name string
	Boot uint64
}

// Message is what two nodes' cores tell each other. Messages may be lost, repeated and overtake each other; a core
// repeats what has to be heard. The slices of a Message are never changed after it has been sent.
type Message interface{ message() }

// Envelope is a Message on its way.
type Envelope struct {
	From, To Node
	Message  Message
	Again    bool // the very same Message was sent before, and may be waiting still
}

// Query asks a member what it knows of partitions that the sender is about to claim.
type Query struct {
	ID         uint64
	Partitions []int
}

// QueryReply answers a Query, in its order. With the ID 0 it answers none: the sender tells what it holds.
type QueryReply struct {
	ID    uint64
	Infos []Info
}

// Info is what a node knows of a partition.
type Info struct {
	Partition int
	Held      bool     // by the node that says so, under Term
	Claiming  bool     // the node that says so is about to claim it as well
	Term      Term     // the highest known to have been held
	Holder    Node     // who held it; may be nobody
	Copy      Position // of a complete copy; zero when there is none
}

// Position says how far a copy has come: the term of its holder and the sequence of the last message it has.
type Position struct {
	Term     Term
	Sequence uint64
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
	Merging  Verdict = 2 // send it: the receiver holds the partition too and will merge
	Refused  Verdict = 3 // not now: the receiver is busy, leaving, or sees another ring
)

// OfferReply answers an Offer.
type OfferReply struct {
	Partition int
	Term      Term // of the Offer
	Verdict   Verdict
}

// Replicate brings a follower up to date. One at a time is in flight for each partition and follower.
type Replicate struct {
	Partition int
	Term      Term
	Sequence  uint64 // one above the message before; the first of a whole copy may be any
	Begin     bool   // the first of a whole copy, which is staged until Complete
	Complete  bool   // with this the whole copy is complete
	Part      int    // index of this message among those that make up one chunk
	Parts     int    // their number, at least 1; all of them but the last carry the chunk's bytes only
	Chunk     []byte
	Sum       uint32 // CRC-32C of Chunk
}

// Outcome answers Replicate and Commit.
type Outcome uint8

// The outcomes.
const (
	Done       Outcome = 1
	Again      Outcome = 2 // the copy has a gap or is damaged: begin anew
	Superseded Outcome = 3 // a higher term is known
	Conflict   Outcome = 4 // the receiver holds the partition itself
	Full       Outcome = 5 // the receiver has no room for the copy, and keeps none: begin anew later
)

// ReplicateAck answers a Replicate.
type ReplicateAck struct {
	Partition int
	Term      Term // of the Replicate
	Sequence  uint64
	Outcome   Outcome
	Known     Term // with Superseded and Conflict: the higher term and whose it is
	Holder    Node
}

// Commit hands a partition over: the sender has stopped deciding and gives it up, under its present term, to the
// receiver, who holds it under a higher one from the moment it has this. The sender repeats it until it is answered.
type Commit struct {
	Replicate      // the last changes
	Known     Term // the highest term the sender knows of
	Release   Node // proof of release together with Term: exactly this process gives up exactly this term
	Merge     bool // the receiver has said that it holds the partition too
	Granted   bool // the sender's strict rules were under a grant, so that its content is whole for them
}

// CommitAck answers a Commit.
type CommitAck struct {
	Partition int
	Term      Term // of the Commit
	Outcome   Outcome
	New       Term   // with Done: the receiver's
	Keep      bool   // with Done: the sender is the receiver's backup and keeps its copy
	Sequence  uint64 // with Keep: the one that the receiver's first Replicate follows
	Known     Term   // with Superseded
	Holder    Node
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
	Backup    Node    // who has a copy that the sender's answers wait for; nobody: they do not wait
	Release   Release // what the record to be replaced was released with; zero when it was not
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
	// Of a refusal: the record that stands against it, and how long that has to live at most. Of a grant: the record of
	// another process that this one's has replaced, told again with every grant; nobody's if there was none.
	Recorded Record
	Wait     time.Duration
}

// Record is what a voter has recorded for a partition.
type Record struct {
	Partition int
	Term      Term
	Node      Node
	Backup    Node
	ID        uint64 // of the request that wrote it: an older one of the same process and term does not write over it
}

// ReadRecords asks a voter for everything it has recorded. It is asked by a voter that has restarted.
type ReadRecords struct{ ID uint64 }

// Records answers ReadRecords.
type Records struct {
	ID      uint64
	Read    bool // the answering voter is past its own reading; otherwise it knows nothing
	Epoch   uint64
	Fresh   bool     // the answering voter began its epoch, and nobody but the asker can have taken it over
	Records []Record // of each partition the record, and the one of another process that it has replaced
}

func (*Query) message()        {}
func (*QueryReply) message()   {}
func (*Entrust) message()      {}
func (*Offer) message()        {}
func (*OfferReply) message()   {}
func (*Replicate) message()    {}
func (*ReplicateAck) message() {}
func (*Commit) message()       {}
func (*CommitAck) message()    {}
func (*Forget) message()       {}
func (*GrantRequest) message() {}
func (*GrantReply) message()   {}
func (*ReadRecords) message()  {}
func (*Records) message()      {}
