// inspect: looks into a model file and runs its parts, one JSON line out.
import quire.base;
import quire.tensor;
import quire.std;

int main() { std::printf("%s\n", quire::dtype_info(quire::DType::Q4_K).name); }
