package httpapi

import (
	"io"

	"github.com/weirlimit/weir/internal/admission"
)

// The estimates of the memory that a request takes while it is carried out, in bytes.
const (
	// perByte is for each byte of a body: the bytes are in a buffer that doubles, and the texts are copied.
	perByte = 4
	// perCheck is for each check of a batch: the check, its operation, its result and its answer. leastCheck is the
	// least size of a check in a body.
	perCheck, leastCheck = 3 << 9, 24
	// lightRequest is the size up to which a request does not enter Requests. The number of requests bounds such
	// requests.
	lightRequest = 16 << 10
	// leastCounted is the size from which an answer counts while it is written, if the request keeps nothing else.
	leastCounted = 8 << 10
)

// countedBody counts the bytes of a body as they are read.
type countedBody struct {
	x    *exchange
	from io.Reader
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.from.Read(p)
	b.x.keep(2 * int64(n)) // the buffer may be twice as large
	return n, err
}

// keep adds to the bytes that Buffers counts for the request, or subtracts from them.
func (x *exchange) keep(bytes int64) {
	if bytes == 0 {
		return
	}
	x.held += bytes
	to := x.Buffers
	if c := admission.FromContext(x.r.Context()); c != nil {
		to = c // counts for Buffers what the connection holds
	}
	if bytes > 0 {
		to.Hold(bytes)
	} else {
		to.Release(-bytes)
	}
}

// admit waits until Requests has room for a request that needs so many bytes. The body has been read; need includes its
// bytes.
func (x *exchange) admit(need int64) error {
	if need <= lightRequest {
		return nil
	}
	taken, err := x.Requests.Enter(x.r.Context(), need)
	x.taken = taken
	x.keep(-x.held) // need includes them
	return err
}

// answering is called when only the answer is left to be written. The request gives up its room in Requests; kept is
// the number of bytes that it keeps while it waits for the network.
func (x *exchange) answering(kept int64) {
	x.keep(kept)
	x.Requests.Leave(x.taken)
	x.taken = 0
}
