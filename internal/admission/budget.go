package admission

// Budget is what the parts of a node may take of memory, in bytes, and the bounds by number that follow from that.
//
// # Shares
//
// Of what the process may use, LimitPercent is the runtime's limit. Of that, base is for what is there whatever happens; the
// rest is divided:
//
//	State         25 %   counters, and copies of other nodes' counters
//	headroom      20 %   for the garbage collector, which works the more often the closer what is live is to the limit
//	Callers       27 %   callers' connections and streams, each counted by what it takes while it is idle
//	Buffers        8 %   what callers' connections have received and nobody has read, or are to write
//	Requests       5 %   requests of many checks while they are carried out
//	InFlight       3 %   checks that wait for other nodes or for copies
//	Nodes          3 %   half of it what 8 other nodes have sent and nobody has read, half of it moves of partitions in progress
//	calls          3 %   unary calls
//	Unread         2 %   answers that wait for their callers to read
//	Kept           2 %   what callers have a node keep besides: reservations of Kuadrant's protocol, buckets of Envoy's quota service
//	Replies        2 %   to other nodes, kept because they may ask again
//
// Nothing is set aside for the most that a stream could take: what it does take beyond its idle bytes is counted in Buffers, Requests
// and Unread while it does.
//
// All but the first two have most sizes, so that a large node does not set memory aside for what is never going to be there:
// what they leave goes to State, up to 70 % of what the process may use. The sum of all fits into the runtime's limit.
type Budget struct {
	Usable int64 // what the process may use
	Limit  int64 // of the runtime: LimitPercent of that

	State    int64
	Callers  int64 // connections of authenticated callers, at all ports together, and their streams
	Buffers  int64
	Requests int64
	Unread   int64
	Kept     int64
	Nodes    int64
	Replies  int64

	MaxInFlight  int // checks
	MaxAnonymous int // connections at each port of callers that have not been authenticated
	MaxCalls     int // unary calls at a time, of all of gRPC's connections
	StreamsEach  int // calls and streams of one connection
	MaxMessage   int64
	MaxParts     int   // of a message that a caller sends: see wire.Parts
	StreamWindow int32 // receive window of a callers' stream
	PeerWindow   int32 // receive window of a stream between nodes

	headroom int64
}

// What things take, in bytes.
const (
	// base is what an idle node takes: the program, its tables for partitions and members, metrics; and the queues of both logs.
	base = 24<<20 + 2*LogQueue

	// PerCheckInFlight is a check of a batch that waits for another node, measured with one that does not answer. One that
	// came alone takes 11 KiB with its call, which the share of calls is for.
	PerCheckInFlight = 3 << 9
	// PerConnection is an idle connection of a caller, measured over gRPC in plain text: three goroutines, the table of headers. One of
	// HTTP or of the Redis protocol takes less. PerTLS is what TLS adds.
	PerConnection, PerTLS = 24 << 10, 16 << 10
	// PerStream is an idle stream: two goroutines, and what gRPC notes of it. perCall is a unary call.
	PerStream, perCall = 24 << 10, 20 << 10
	// perClient is a client that does everything on one stream, and leastCallers what there is for connections and streams however few
	// are to be taken.
	perClient, leastCallers = PerConnection + PerStream, 8 * mib
	// peerWindows is how many windows there are to and from 8 other nodes: of a stream of operations and one of ownership messages
	// each way.
	peerWindows = 8 * 2 * 2
)

const mib = 1 << 20

const (
	// maxParts is the most elements of lists and maps of a message that a caller sends, at all depths, and perPart what one takes when it is
	// decoded.
	maxParts, perPart = 1 << 16, 160
	// leastPart is the fewest bytes that an element is sent as. (One of a packed list is a byte, and takes 8.)
	leastPart = 2
)

// Parts is what the elements of lists and maps may take of a message of so many bytes, when it is decoded.
func Parts(size int) int64 { return int64(min(size/leastPart, maxParts)) * perPart }

// LogQueue is how many bytes of each log wait for who reads it: of the log, and of the audit log.
const LogQueue = mib / 2

// Divide returns the budget of a node that may use so many bytes. Whatever the number, no bound is below the least that a node
// can work with; below 64 MiB they are not promised to fit.
func Divide(usable int64) Budget {
	limit := usable / 100 * LimitPercent
	rest := max(limit-base, 8*mib)
	share := func(percent, most int64) int64 { return min(rest/100*percent, most) }
	b := Budget{
		Usable: usable, Limit: limit,
		Buffers:  share(8, 1024*mib),
		Requests: share(5, 384*mib),
		Unread:   max(share(2, 256*mib), mib),
		Kept:     share(2, 128*mib),
		Nodes:    share(3, 2*peerWindows*mib),
		Replies:  share(2, 64*mib),
	}
	b.MaxInFlight = max(int(share(3, 50_000*PerCheckInFlight)/PerCheckInFlight), 1000)
	b.MaxCalls = max(int(share(3, 10_000*perCall)/perCall), 1)
	callers := share(27, 40_000*perClient)
	b.MaxAnonymous = min(max(int(callers/PerConnection/48), 1), 128)
	b.Callers = max(callers-b.anonymous(), perClient)
	b.StreamsEach = min(int(b.Callers/PerStream/4)+1, 1000)
	// A quarter of Buffers, so that one message does not keep all others out; the longest keys of a full batch fit into 2 MiB.
	b.MaxMessage = min(max(b.Buffers/4, mib), 4*mib)
	b.MaxParts = int(min(b.Requests/perPart, maxParts))
	b.StreamWindow = int32(min(max(b.Buffers/1024, 64<<10), 512<<10))
	b.PeerWindow = int32(min(max(b.Nodes/2/peerWindows, 64<<10), mib))
	b.headroom = share(20, 1024*mib)
	if short := b.Sum() + LeastState - b.Limit; short > 0 { // a small node's state is worth more than its callers
		b.Callers = max(b.Callers-short, perClient)
	}
	b.Refit()
	return b
}

// anonymous returns what the connections of callers that have not been authenticated take, at the ports of gRPC and of HTTP.
func (b *Budget) anonymous() int64 { return 2 * int64(b.MaxAnonymous) * PerConnection }

// Admit sets Callers so that so many clients fit that have one connection and one stream each.
func (b *Budget) Admit(clients int) { b.Callers = max(int64(clients)*perClient, leastCallers) }

// Clients returns how many clients with one connection in plain text and one stream each fit into Callers.
func (b *Budget) Clients() int { return int(b.Callers / perClient) }

// LeastState is the least that a node can work with for State.
const LeastState = 12 * mib

// Refit sets State to what the other parts leave, after they have been changed.
func (b *Budget) Refit() {
	b.State = 0
	b.State = max(min(b.Limit-b.Sum(), b.Usable/100*70), LeastState)
}

// Sum returns what all parts take together, with base and the collector's headroom.
func (b *Budget) Sum() int64 {
	return base + b.headroom + b.State + b.Callers + b.anonymous() + b.Buffers + b.Requests + b.Unread + b.Kept + b.Nodes + b.Replies +
		int64(b.MaxInFlight)*PerCheckInFlight + int64(b.MaxCalls)*perCall
}
