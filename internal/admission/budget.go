package admission

// Budget has the bytes that each part of a node may use, and the bounds by number that follow from these bytes.
//
// # Shares
//
// The runtime's memory limit (Limit) is LimitPercent of what the process may use (Usable). Divide subtracts base, which
// an idle node takes, from Limit, and divides the rest:
//
//	State         25 %   counters, and copies of other nodes' counters
//	headroom      20 %   for the garbage collector, which runs more often the closer the live heap is to the limit
//	Callers       27 %   callers' connections and streams, each counted by what it takes while it is idle
//	Buffers        8 % bytes that callers' connections have received and the server has not read, and bytes that wait to
//	               be written
//	Requests       5 %   requests of many checks while they are carried out
//	InFlight       3 %   checks that wait for other nodes or for copies
//	Nodes          3 % half of it: bytes that 8 other nodes have sent and this one has not read; half of it: moves of
//	               partitions in progress
//	calls          3 %   unary calls
//	Unread         2 %   answers that wait for their callers to read them
//	Kept           2 %   buckets of Envoy's quota service
//
// No share is set aside for the most that a stream could take. What a stream takes beyond its idle bytes is counted in
// Buffers, Requests and Unread while it takes it.
//
// Every share but State has a maximum, so that a large node does not set memory aside that it will never use. State
// gets what the other shares leave, up to 70 % of Usable. The sum of all shares and base fits into Limit.
type Budget struct {
	Usable int64 // what the process may use
	Limit  int64 // the runtime's memory limit: LimitPercent of Usable

	State    int64
	Callers  int64 // connections of authenticated callers, at all ports together, and their streams
	Buffers  int64
	Requests int64
	Unread   int64
	Kept     int64
	Nodes    int64

	MaxInFlight  int // checks
	MaxAnonymous int // anonymous connections at each port
	MaxCalls     int // unary calls at a time, on all gRPC connections together
	StreamsEach  int // calls and streams of one connection
	MaxMessage   int64
	MaxParts     int   // elements of lists and maps in a message that a caller sends: see wire.Parts
	StreamWindow int32 // receive window of a stream of a caller
	PeerWindow   int32 // receive window of a stream between nodes

	headroom int64
}

// Bytes that things take.
const (
	// base is what an idle node takes: the program, its tables of partitions and members, metrics, and the queues of
	// both logs.
	base = 24<<20 + 2*LogQueue

	// PerCheckInFlight is a check of a batch that waits for another node; it was measured with a node that does not
	// answer. A check that came alone takes 11 KiB with its call, which are counted in the share of calls.
	PerCheckInFlight = 3 << 9
	// PerConnection is an idle gRPC connection of a caller in plain text: three goroutines and the table of headers. A
	// connection over HTTP or the Redis protocol takes less. PerTLS is what TLS adds.
	PerConnection, PerTLS = 24 << 10, 16 << 10
	// PerStream is an idle stream: two goroutines and gRPC's record of the stream. perCall is a unary call.
	PerStream, perCall = 24 << 10, 20 << 10
	// perClient is a client that does everything on one stream. leastCallers is the least that Admit sets Callers to.
	perClient, leastCallers = PerConnection + PerStream, 8 * mib
	// peerWindows is the number of receive windows to and from 8 other nodes: with each node, a stream of operations
	// and a stream of ownership messages in each direction.
	peerWindows = 8 * 2 * 2
)

const mib = 1 << 20

const (
	// maxParts is the most elements of lists and maps, at all depths, in a message that a caller sends. perPart is the
	// bytes that one element takes when it is decoded.
	maxParts, perPart = 1 << 16, 160
	// leastPart is the fewest bytes that an element takes in a message. (An element of a packed list takes one byte
	// there, and 8 bytes decoded.)
	leastPart = 2
)

// Parts returns how many bytes the elements of lists and maps of a message of size bytes may take when it is decoded.
func Parts(size int) int64 { return int64(min(size/leastPart, maxParts)) * perPart }

// LogQueue bounds, in bytes, the queue of each of the two logs: the log and the audit log. A queue holds what its
// reader has not read yet.
const LogQueue = mib / 2

// Divide returns the budget of a node that may use this many bytes. Every bound is at least the least that a node can
// work with. Below 64 MiB the sum of the shares may therefore exceed Limit.
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
	}
	b.MaxInFlight = max(int(share(3, 50_000*PerCheckInFlight)/PerCheckInFlight), 1000)
	b.MaxCalls = max(int(share(3, 10_000*perCall)/perCall), 1)
	callers := share(27, 40_000*perClient)
	b.MaxAnonymous = min(max(int(callers/PerConnection/48), 1), 128)
	b.Callers = max(callers-b.anonymous(), perClient)
	b.StreamsEach = min(int(b.Callers/PerStream/4)+1, 1000)
	// MaxMessage is a quarter of Buffers, so that one message does not keep all others out. The longest keys of a full
	// batch fit into 2 MiB.
	b.MaxMessage = min(max(b.Buffers/4, mib), 4*mib)
	b.MaxParts = int(min(b.Requests/perPart, maxParts))
	b.StreamWindow = int32(min(max(b.Buffers/1024, 64<<10), 512<<10))
	b.PeerWindow = int32(min(max(b.Nodes/2/peerWindows, 64<<10), mib))
	b.headroom = share(20, 1024*mib)
	if short := b.Sum() + LeastState - b.Limit; short > 0 { // on a small node, State comes before Callers
		b.Callers = max(b.Callers-short, perClient)
	}
	b.Refit()
	return b
}

// PeerBuffers returns the bound of the bytes that other nodes have sent and this one has not read, and of answers that
// they have not read. It is beyond what honest nodes have in flight (Nodes), and half of it has room for two messages
// of up to message bytes: a process with a node's certificate can reach it, and other nodes should not wait.
func (b *Budget) PeerBuffers(message int64) int64 { return max(4*b.Nodes, 4*message) }

// anonymous returns what anonymous connections take, at the ports of gRPC and of HTTP together.
func (b *Budget) anonymous() int64 { return 2 * int64(b.MaxAnonymous) * PerConnection }

// Admit sets Callers so that this many clients fit, each with one connection in plain text and one stream.
func (b *Budget) Admit(clients int) { b.Callers = max(int64(clients)*perClient, leastCallers) }

// Clients returns how many clients fit into Callers, each with one connection in plain text and one stream.
func (b *Budget) Clients() int { return int(b.Callers / perClient) }

// LeastState is the least State that a node can work with.
const LeastState = 12 * mib

// Refit sets State to what the other parts leave. The caller must call it after it has changed another part.
func (b *Budget) Refit() {
	b.State = 0
	b.State = max(min(b.Limit-b.Sum(), b.Usable/100*70), LeastState)
}

// Sum returns what all parts take together, with base and the collector's headroom.
func (b *Budget) Sum() int64 {
	return base + b.headroom + b.State + b.Callers + b.anonymous() + b.Buffers + b.Requests + b.Unread + b.Kept +
		b.Nodes + int64(b.MaxInFlight)*PerCheckInFlight + int64(b.MaxCalls)*perCall
}
