package memory

// Budget is what the parts of a node may take of memory, in bytes, and the bounds by number that follow from that.
//
// # Shares
//
// Of what the process may use, LimitPercent is the runtime's limit. Of that, base is for what is there whatever happens; the
// rest is divided:
//
//	State         37 %   counters, and copies of other nodes' counters
//	headroom      20 %   for the garbage collector, which works the more often the closer what is live is to the limit
//	Buffers       11 %   what callers' gRPC connections have received and nobody has read, or are to write
//	Calls          7 %   requests of many checks while they are carried out
//	InFlight       5 %   checks that wait for other nodes or for copies
//	Unread         4 %   answers that wait for their callers to read
//	connections    6 %   callers' connections, of gRPC and of HTTP
//	streams        3 %   calls and streams on them
//	Kept           2 %   what callers have a node keep besides: reservations of Kuadrant's protocol, buckets of Envoy's quota
//	                     service, what streams of checks define
//	Nodes          3 %   half of it what 8 other nodes have sent and nobody has read, half of it moves of partitions in progress
//	Replies        2 %   to other nodes, kept because they may ask again
//
// All but the first two have most sizes, so that a large node does not set memory aside for what is never going to be there:
// what they leave goes to State, up to 70 % of what the process may use. The sum of all fits into the runtime's limit.
type Budget struct {
	Usable int64 // what the process may use
	Limit  int64 // of the runtime: LimitPercent of that

	State   int64
	Buffers int64
	Calls   int64
	Unread  int64
	Kept    int64
	Nodes   int64
	Replies int64

	MaxInFlight    int // checks
	MaxConnections int // at each port, of callers that have been authenticated
	MaxAnonymous   int // at each port, of others
	MaxStreams     int // calls and streams at a time, of all of gRPC's connections
	StreamsEach    int // of one connection
	MaxMessage     int64
	MaxParts       int   // of a message that a caller sends: see wire.Parts
	StreamWindow   int32 // receive window of a callers' stream
	PeerWindow     int32 // receive window of a stream between nodes
	ReadBuffer     int   // that a connection of callers' gRPC reads into

	headroom int64
}

// What things take, in bytes.
const (
	// base is what an idle node takes: the program, its tables for partitions and members, metrics; and the queues of both logs.
	base = 24<<20 + 2*LogQueue

	// PerCheckInFlight is a check of a batch that waits for another node, measured with one that does not answer. One that
	// came alone takes 11 KiB with its call, which the share of streams is for.
	PerCheckInFlight = 3 << 9
	// perConnection is a connection of gRPC, and one of HTTP beside it: measured in plain text and idle, 22 KiB and 16 KiB, and
	// the buffer that the first reads into; TLS adds some 16 KiB to what is idle, and twice that to what is busy.
	perConnection = 56<<10 + readBuffer
	readBuffer    = 8 << 10
	// perStream is a call or a stream: two goroutines, and what gRPC notes of it.
	perStream = 20 << 10
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
		Buffers:    share(11, 1024*mib),
		Calls:      share(7, 384*mib),
		Unread:     share(4, 256*mib),
		Kept:       share(2, 128*mib),
		Nodes:      share(3, 2*peerWindows*mib),
		Replies:    share(2, 64*mib),
		ReadBuffer: readBuffer,
	}
	connections, streams := share(6, 10_000*perConnection), share(3, 50_000*perStream)
	b.MaxInFlight = int(share(5, 50_000*PerCheckInFlight) / PerCheckInFlight)
	n := int(connections / perConnection)
	b.MaxAnonymous = min(max(n/5, 1), 128)
	b.MaxConnections = max(n-b.MaxAnonymous, 1)
	b.MaxStreams = max(int(streams/perStream), 1)
	b.StreamsEach = min(b.MaxStreams/4+1, 1000)
	// A quarter of Buffers, so that one message does not keep all others out; the longest keys of a full batch fit into 2 MiB.
	b.MaxMessage = min(max(b.Buffers/4, mib), 4*mib)
	b.MaxParts = int(min(b.Calls/perPart, maxParts))
	b.StreamWindow = int32(min(max(b.Buffers/1024, 64<<10), 512<<10))
	b.PeerWindow = int32(min(max(b.Nodes/2/peerWindows, 64<<10), mib))
	b.headroom = share(20, 1024*mib)
	b.Refit()
	return b
}

// LeastState is the least that a node can work with for State.
const LeastState = 12 * mib

// Refit sets State to what the other parts leave, after they have been changed.
func (b *Budget) Refit() {
	b.State = 0
	b.State = max(min(b.Limit-b.Sum(), b.Usable/100*70), LeastState)
}

// Sum returns what all parts take together, with base and the collector's headroom.
func (b *Budget) Sum() int64 {
	return base + b.headroom + b.State + b.Buffers + b.Calls + b.Unread + b.Kept + b.Nodes + b.Replies +
		int64(b.MaxInFlight)*PerCheckInFlight + int64(b.MaxConnections+b.MaxAnonymous)*perConnection + int64(b.MaxStreams)*perStream
}
