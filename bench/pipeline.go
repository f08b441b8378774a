package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// A pipe is one connection on which messages of one check are in flight, each answered by one, in order. One goroutine
// sends and one receives.
type pipe interface {
	send(key string) error
	flush() error // before the sender waits
	receive() error
}

// pipelineCaller keeps unaryCallers messages in flight in the pipe that open returns, which ends with its context.
func pipelineCaller(open func(context.Context) (pipe, error), keys []string) caller {
	return func(ctx context.Context, r *recorder) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		p, err := open(ctx)
		if err != nil {
			r.done(time.Now(), 0, err)
			return
		}
		sent := make(chan time.Time, unaryCallers) // its capacity bounds what is in flight
		var sender sync.WaitGroup
		defer sender.Wait()
		sender.Go(func() {
			defer close(sent)
			for i := 0; !r.over(); i++ {
				now := time.Now()
				select {
				case sent <- now:
				default:
					if p.flush() != nil {
						return // the receiver learns why
					}
					select {
					case sent <- now:
					case <-ctx.Done():
						return
					}
				}
				if p.send(keys[i*7919%len(keys)]) != nil {
					return
				}
			}
			_ = p.flush() // as above
		})
		for at := range sent {
			err := p.receive()
			r.done(at, 1, err)
			if err != nil {
				cancel()
				return
			}
		}
	}
}

// echoPipe is a gRPC stream of the messages of the unary call.
type echoPipe struct {
	stream grpc.ClientStream
	req    *weirv1.CheckRequest
	resp   *weirv1.CheckResponse
}

func openEchoPipe(conn grpc.ClientConnInterface) func(context.Context) (pipe, error) {
	return func(ctx context.Context) (pipe, error) {
		stream, err := conn.NewStream(ctx, echoStream(), echoStreamMethod)
		return &echoPipe{stream, newCheckRequest("bucket", 1), new(weirv1.CheckResponse)}, err
	}
}

func (p *echoPipe) send(key string) error {
	p.req.Checks[0].Target.Key = key
	return p.stream.SendMsg(p.req)
}

func (p *echoPipe) flush() error   { return nil }
func (p *echoPipe) receive() error { return p.stream.RecvMsg(p.resp) }

// weirPipe is Weir's stream of checks, one in each message.
type weirPipe struct {
	stream weirv1.Limiter_CheckStreamClient
	req    *weirv1.CheckStreamRequest
}

func openWeirPipe(api weirv1.LimiterClient) func(context.Context) (pipe, error) {
	return func(ctx context.Context) (pipe, error) {
		stream, err := api.CheckStream(ctx)
		if err != nil {
			return nil, err
		}
		return &weirPipe{stream, &weirv1.CheckStreamRequest{Define: []*weirv1.StreamTarget{{Policy: "bucket"}}, KeyLengths: []uint32{0}}}, nil
	}
}

func (p *weirPipe) send(key string) error {
	p.req.Sequence++
	p.req.Keys = append(p.req.Keys[:0], key...)
	p.req.KeyLengths[0] = uint32(len(key))
	err := p.stream.Send(p.req)
	p.req.Define = nil // once is enough
	return err
}

func (p *weirPipe) flush() error { return nil }

func (p *weirPipe) receive() error {
	resp, err := p.stream.Recv()
	switch {
	case err != nil:
		return err
	case resp.Error != nil:
		return fmt.Errorf("not decided: %s", resp.Error.Message)
	case len(resp.Errors) > 0:
		return fmt.Errorf("not decided: %s", resp.Errors[0].GetError().GetMessage())
	case len(resp.Flags) == 1 && resp.Flags[0]&uint32(weirv1.StreamFlag_STREAM_FLAG_FAILED_OPEN|weirv1.StreamFlag_STREAM_FLAG_FAILED_CLOSED) != 0:
		return errors.New("decided by on_error: the owner did not answer")
	}
	return nil
}

// tcpPipe is a bare connection: messages behind their lengths, as many in a write as there are.
type tcpPipe struct {
	w    *bufio.Writer
	r    *bufio.Reader
	req  *weirv1.CheckRequest
	room []byte
}

func openTCP(ctx context.Context, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err == nil {
		context.AfterFunc(ctx, func() { conn.Close() })
	}
	return conn, err
}

func openTCPPipe(address string) func(context.Context) (pipe, error) {
	return func(ctx context.Context) (pipe, error) {
		conn, err := openTCP(ctx, address)
		if err != nil {
			return nil, err
		}
		return &tcpPipe{w: bufio.NewWriterSize(conn, tcpBuffer), r: bufio.NewReaderSize(conn, tcpBuffer), req: newCheckRequest("bucket", 1)}, nil
	}
}

func (p *tcpPipe) send(key string) error {
	p.req.Checks[0].Target.Key = key
	var err error
	if p.room, err = appendFramed(p.room[:0], p.req); err != nil {
		return err
	}
	_, err = p.w.Write(p.room)
	return err
}

func (p *tcpPipe) flush() error { return p.w.Flush() }

func (p *tcpPipe) receive() error { return skipFramed(p.r) }

// tcpBuffer holds the messages of all callers.
const tcpBuffer = 64 << 10

func appendFramed(to []byte, m proto.Message) ([]byte, error) {
	to = binary.LittleEndian.AppendUint32(to, uint32(proto.Size(m)))
	return proto.MarshalOptions{}.MarshalAppend(to, m)
}

func skipFramed(r *bufio.Reader) error {
	head, err := r.Peek(4)
	if err != nil {
		return err
	}
	_, err = r.Discard(4 + int(binary.LittleEndian.Uint32(head)))
	return err
}

// serveTCP answers every message with one as long as Weir's answer, and reads neither.
func serveTCP(l net.Listener) error {
	answer, err := appendFramed(nil, echoResponse(1))
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			r, w := bufio.NewReaderSize(conn, tcpBuffer), bufio.NewWriterSize(conn, tcpBuffer)
			for skipFramed(r) == nil {
				if _, err := w.Write(answer); err != nil {
					return
				}
				if r.Buffered() == 0 && w.Flush() != nil {
					return
				}
			}
		}()
	}
}

// pingPipe is a connection to Redis that says PING.
type pingPipe struct {
	w *bufio.Writer
	r *bufio.Reader
}

func openPingPipe(address string) func(context.Context) (pipe, error) {
	return func(ctx context.Context) (pipe, error) {
		conn, err := openTCP(ctx, address)
		if err != nil {
			return nil, err
		}
		return &pingPipe{bufio.NewWriterSize(conn, tcpBuffer), bufio.NewReaderSize(conn, tcpBuffer)}, nil
	}
}

func (p *pingPipe) send(string) error {
	_, err := io.WriteString(p.w, "PING\r\n")
	return err
}

func (p *pingPipe) flush() error { return p.w.Flush() }

func (p *pingPipe) receive() error {
	line, err := p.r.ReadSlice('\n')
	if err == nil && string(line) != "+PONG\r\n" {
		err = fmt.Errorf("Redis answered %q", line)
	}
	return err
}

// streamMeasurements compare one connection with 256 messages of one check in flight: what a stream costs, and what is
// below it.
func (b *bench) streamMeasurements() []measurement {
	const work = "stream"
	return []measurement{
		{work: work, system: "tcp-echo", run: func(ctx context.Context) (sample, error) {
			f, err := b.echoTCP()
			if err != nil {
				return nil, err
			}
			return b.load(1, f.servers...).drive(ctx, func(int) caller { return pipelineCaller(openTCPPipe(f.address), b.keys) })
		}},
		{work: work, system: "redis-ping", run: func(ctx context.Context) (sample, error) {
			r, err := b.redis()
			if err != nil {
				return nil, err
			}
			return b.load(1, r.server).drive(ctx, func(int) caller { return pipelineCaller(openPingPipe(r.address), b.keys) })
		}},
		{work: work, system: "echo", run: func(ctx context.Context) (sample, error) {
			f, err := b.echo()
			if err != nil {
				return nil, err
			}
			conns, err := dial(f.address, 1)
			if err != nil {
				return nil, err
			}
			return b.load(1, f.servers...).drive(ctx, func(int) caller { return pipelineCaller(openEchoPipe(conns[0]), b.keys) })
		}},
		{work: work, system: "weir", run: func(ctx context.Context) (sample, error) {
			w, err := b.weirOne()
			if err != nil {
				return nil, err
			}
			return b.load(1, w.servers...).drive(ctx, func(int) caller { return pipelineCaller(openWeirPipe(w.clients[0][0]), b.keys) })
		}},
	}
}
