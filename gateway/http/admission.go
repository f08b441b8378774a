package httpapi

import "io"

// What requests take while they are carried out, in bytes, about.
const (
	// perByte is for each byte of a body: it is read into a buffer that doubles, and its texts are copied.
	perByte = 4
	// perCheck is a check of a batch with its operation, its result and its answer, and leastCheck the fewest bytes it is sent as.
	perCheck, leastCheck = 3 << 9, 24
	// lightRequest is what a request may take that is not counted: requests are bounded by their number.
	lightRequest = 16 << 10
)

// countedBody counts the bytes of a body as they come in.
type countedBody struct {
	x    *exchange
	from io.Reader
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.from.Read(p)
	b.x.keep(2 * int64(n)) // the buffer doubles
	return n, err
}

// keep counts bytes of a request that waits for the network.
func (x *exchange) keep(bytes int64) {
	if bytes == 0 {
		return
	}
	x.held += bytes
	if bytes > 0 {
		x.Buffers.Hold(bytes)
	} else {
		x.Buffers.Release(-bytes)
	}
}

// admit waits until there is room to carry out a request that needs so many bytes and whose body has been read.
func (x *exchange) admit(need int64) error {
	if need <= lightRequest {
		return nil
	}
	taken, err := x.Requests.Enter(x.r.Context(), need)
	x.taken = taken
	x.keep(-x.held) // need has it
	return err
}

// answering is called when all that is left of a request is to write its answer: it makes way for others, and what it keeps
// counts as waiting for the network: that many bytes.
func (x *exchange) answering(kept int64) {
	x.keep(kept)
	x.Requests.Leave(x.taken)
	x.taken = 0
}
